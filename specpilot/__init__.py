"""Specpilot: an adaptive controller for speculative decoding in SGLang, with a policy learned online.

The three packages lie at the top of the repository and are linked into this folder, so that the name by which
they are imported is the same in a checkout, in an editable installation and in a wheel.
"""
