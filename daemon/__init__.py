"""colibrid: serves one container over gRPC and keeps sessions.

Owns text, policy, configuration and the network; hands token ids to the core and never touches a model's bytes itself.
Knows nothing of the packer or of Hugging Face names.
"""
