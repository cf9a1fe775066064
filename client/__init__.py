"""colibri: the Python client library and command line.

Speaks the protocol of colibri.v1 and depends on nothing else of this project.
"""
