"""The faces of other libraries, for scripts written for them."""
