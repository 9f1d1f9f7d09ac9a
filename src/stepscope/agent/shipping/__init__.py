"""How a node's run directory gets to the hub: what is not there yet is sent until it is; the hub keeps the account."""
