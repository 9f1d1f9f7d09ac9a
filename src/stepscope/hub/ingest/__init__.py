"""What agents send: who may send it, the requests it comes in, and the files it is read from again."""
