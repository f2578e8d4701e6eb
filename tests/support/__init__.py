"""What several tests share: tiny models, their files, and a CUDA emulator."""
