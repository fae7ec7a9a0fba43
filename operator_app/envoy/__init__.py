"""Envoy's static configuration, rendered from an EnvoyProxy's spec. Pure.

``bootstrap`` renders the whole; ``listeners``, ``clusters`` and ``drain`` build one part each from ``messages``.
"""
