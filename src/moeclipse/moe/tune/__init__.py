"""What a layer decides about its exchange, and the measurements that it decides by."""
