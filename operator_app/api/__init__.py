"""The custom resources: models, CRD schema, kinds, and quantities as Kubernetes spells them."""
