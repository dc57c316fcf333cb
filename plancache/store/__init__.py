"""Where entries lie."""
