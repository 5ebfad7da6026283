"""Tables at home in host memory or on a disk, behind an exact cache on the device that computes."""
