"""Files: Hugging Face folders in and out, tensor by tensor."""
