"""Files → columns: Kineto's JSON and exports of Nsight Systems. Everything broken in a file is reported."""
