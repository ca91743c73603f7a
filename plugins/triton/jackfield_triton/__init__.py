"""What plugins with Triton kernels share, whatever their family. No plugin itself."""
