def find_memory(view):
    return []
