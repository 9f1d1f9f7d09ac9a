"""What a capture says: its traces analyzed, and what its slow rank does longer than the others.

rank_times.py    a rank's trace → how long each operator, kernel and line takes in a step (``RankTimes``)
differences.py   RankTimes of several ranks → what the slow one does longer (``Difference``)
analyze.py       a capture's folder → its ``CaptureRecord`` with verdict, findings and differences; ``analysis.json``
__main__.py      the same as a separate process, which the run's hub starts at low priority

Processes that Stepscope did not start are captured by speaking to Kineto in their process:

kineto_protocol.py  what Kineto asks its daemon and is answered, as bytes
kineto_process.py   a process found by its pid: who it is, how its files are reached
kineto_socket.py    the daemon's socket, with the kernel's word on who sends
kineto_daemon.py    one trace from each of several processes
"""
