"""The operator's API: what a custom resource may contain, and how objects are addressed. Pure.

``rules`` and ``fields`` define the validation that ``models`` (EnvoyProxy) and ``records`` (the in-cluster registry)
use, and ``crd`` renders those two as CustomResourceDefinitions.
"""
