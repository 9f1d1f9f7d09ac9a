"""One module per command: HELP, EPILOG, add_arguments() and run(). Imported only when needed."""
