"""The parts of the screen: each a function from a snapshot and a size to lines of text.  Nothing here knows Textual."""
