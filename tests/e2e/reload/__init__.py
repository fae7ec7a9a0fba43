"""A running proxy takes another configuration: on a real node, with the operator where it reaches Pods."""
