def find_trends(view, left_ns):
    return []
