"""Tools around recording: model conversion and token files."""
