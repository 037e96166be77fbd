"""Environments that are there, and what environments of all kinds are played with.

``tools`` (TRL's), ``gym`` and ``replay`` make environments of what people have; ``chat``, ``texts`` and ``writers``
write conversations; ``failures``, ``workers``, ``forking`` and ``report`` keep what goes wrong in one to its episode.
"""
