def find_spikes(view, left_ns, claims):
    return []
