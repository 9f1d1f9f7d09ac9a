"""What other tools get of a run: metrics and findings for trackers and telemetry.

    run_feed.py   what is new in a run, active or over, in order and once, from the hub's API in this process
    exporter.py   what every tool's file provides, the tools by name, and the loop that feeds them
    TOOL.py       one file per tool; its library is loaded only there

Everything runs in a separate process, never in a training process: a tool that is slow, fails or hangs delays
nothing.
"""
