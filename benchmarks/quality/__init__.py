"""Quality beside the peers: see run.py."""
