"""Wires carry bytes of host memory between ranks, in the order in which they were sent. Both sides
know the sizes, and a peer that dies is noticed.

| wire | between | driven by |
|---|---|---|
| SharedWire | ranks of one machine | the engine |
| TcpWire | machines | the engine |
| UcxWire | any ranks | ucx_channel.py |
"""
