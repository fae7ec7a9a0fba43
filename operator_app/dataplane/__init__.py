"""What runs: the Pods of proxies, what their Envoys say they have loaded, and how files arrive there soon.

How files are rendered does not belong here (``envoy``), nor what becomes a condition of what is found (``status``).
"""
