"""Questions of loops to frozen pools: pools of engines that serve a model which is not trained."""
