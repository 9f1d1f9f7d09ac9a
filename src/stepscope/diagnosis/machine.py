def find_machine(view):
    return []
