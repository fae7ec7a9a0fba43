"""The operator as it is shipped: its image from the Dockerfile, in Pods, installed from ``manifests`` on a real node.

Minutes long, root needed; ``make test-cluster`` runs it. Everything is built and started here, and gone afterwards.
"""
