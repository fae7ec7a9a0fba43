"""Fault injection: faults as data, two carriers that make them happen, and the campaign that tries every point.

``plan`` is the vocabulary and ``injector`` counts points; ``transport`` and ``proxy`` carry faults out inside and
outside of the operator's process, with the ``responses`` of an API server in trouble. ``scenarios``, ``catalogue``,
``campaign``, ``observer`` and ``checks`` make the experiment, ``conduct`` runs it, and ``report`` writes the page.
``python -m tests.e2e.faults`` runs all of it.
"""
