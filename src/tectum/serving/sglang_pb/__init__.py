"""SGLang's gRPC messages: `sglang_encoder_pb2.py` and its types are generated from the `.proto` file beside them."""
