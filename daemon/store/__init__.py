"""Sessions on disk: the token log (the truth), KV pages (a shortcut), and the folder that holds both.

Owns everything under the daemon's state folder. Refuses folders of another version or in use by another daemon, and
never guesses: what fails its checksum goes to quarantine and is named. Knows sessions, token ids and opaque pages; no
text, no model.
"""
