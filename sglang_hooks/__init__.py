"""The plugin inside an SGLang server, and the wire messages it speaks.

Imports nothing but msgspec, numpy, pyzmq and SGLang: whatever is imported here is
imported in a production server. See ``plugin.py`` for where it hooks in.
"""
