"""Claims, one file a family: a module lists its own in ``CLAIMS``. A new file here is found by
itself.
"""
