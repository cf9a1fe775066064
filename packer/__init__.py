"""colibri-pack: turns a Hugging Face checkpoint into a container that colibrid can serve.

Owns the reading of checkpoints, the families and the layout of the container. Refuses to do arithmetic itself, which is
the core's, and knows nothing of the daemon.
"""
