"""Real controllers beside the control plane: AppWrapper, Kueue and MCAD as plain processes on free loopback ports.

`modules/` has the Go modules that `build.py` builds. `manifests.py` takes custom resources, roles and webhooks from the
folder of the module itself. `appwrapper.py`, `kueue.py` and `mcad.py` install one controller each and say how it is
started; `processes.py` runs them. `queues.py` makes what tests need of Kueue: queues and priorities.

Each controller authenticates itself as the service account of its own installation, with the roles of that one.
"""
