"""Fault injection: faults as data, two carriers that make them happen, and the campaign that tries every point.

``plan`` is the vocabulary and ``ledger`` counts; ``transport`` and ``proxy`` carry faults out inside and outside of the
operator's process. ``scenarios``, ``catalogue``, ``campaign`` and ``verdict`` are the experiment made of them.
``python -m tests.e2e.faults`` runs all of it.
"""
