"""A real Kubernetes control plane on this machine, with nodes that run the commands of pods as plain processes."""
