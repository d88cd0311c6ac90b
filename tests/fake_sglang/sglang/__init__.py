"""Takes the place of SGLang where it is started: `python -m sglang.launch_server`."""
