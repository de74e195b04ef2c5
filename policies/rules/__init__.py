"""The rules around what the models expect: choice, switching, exploration, recovery, vetoes, an operator's bounds.

Rules may import ``models``, which know none of them. They hold no model: a policy hands them what it expects.
"""
