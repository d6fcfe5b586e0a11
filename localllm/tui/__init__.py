"""The terminal UI: a chat app and the board of `localllm top`."""

import os

# Frames per second at most: a change by a key is drawn in the next frame. Textual's default is 60, and it reads
# this when it is imported.
os.environ.setdefault("TEXTUAL_FPS", "240")
