"""Files → columns: Kineto's JSON, exports of Nsight Systems; whatever is broken in them is said."""
