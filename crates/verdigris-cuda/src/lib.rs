//! Programs onto the GPU: the only room that knows the driver.
