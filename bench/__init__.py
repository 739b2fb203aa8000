"""Speed and memory of every operator beside its peers: `python -m bench`."""
