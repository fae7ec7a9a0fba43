"""The record of a proxy outside of its namespace, and the hostname that it claims."""
