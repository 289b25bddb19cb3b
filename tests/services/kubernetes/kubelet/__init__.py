"""A kubelet that runs the commands of pods as plain processes, for the real control plane of the tests.

One process serves several nodes. `node.py` keeps a node and its pods in step with the API server, `pods.py` takes one
pod through its life, `status.py` holds what the API server is told, `environment.py`, `volumes.py` and `images.py`
prepare a container, `names.py` gives it an address and names, `process.py` and `mounts.py` start it, `logs.py` keeps
its output, `log_server.py` serves it to the API server, and `faults.py` and `control.py` let tests make it misbehave.

What it is not: there are no containers. A process sees the files and the network of this machine; a container's own
files are only the volumes it mounts and, if it has a subdomain, its hosts file. Limits of memory and processor time,
users, capabilities, probes, hooks and sidecars are not honoured.
"""
