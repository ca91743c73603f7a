"""Kernels in C for CPUs, built on the machine they run on, and shared by plugins of several families. No plugin
itself.
"""
