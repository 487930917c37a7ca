"""What the integrations of engines share: vLLM's connector and SGLang's linker."""
