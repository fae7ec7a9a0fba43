"""Envoy's configuration, rendered from an EnvoyProxy's spec. Pure.

``files`` renders the whole; ``bootstrap``, ``listeners``, ``clusters``, ``internal`` and ``drain`` build one part each
from ``messages``.
"""
