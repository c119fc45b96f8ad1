"""A model for NVIDIA Triton Inference Server's Python backend: files in, logits out.

Put it into ``models/photos/1/model.py``. Its ``config.pbtxt`` names one input IMAGES (TYPE_STRING,
the bytes of a file each, dims [-1]) and one output LOGITS (TYPE_FP32, dims [-1, 1000]). All files
of the requests that came together are decoded and transformed in one batch, on the GPU where there
is one. A request with a file that cannot be decoded gets an error, as an empty one does, and the
others their answers.

Pillow decodes what is no JPEG, by whatever plugins it has: an EPS file starts Ghostscript, if that
is installed. Where files come from strangers, refuse all but the formats that you expect, by their
first bytes, before this.
"""

import kornia.augmentation as K
import torch
import triton_python_backend_utils as pb_utils
from torchvision.models import resnet18

from gpuprefetch import BadImageError, CenterCrop, Resize, preprocess

MEAN = torch.tensor([0.485, 0.456, 0.406])
STD = torch.tensor([0.229, 0.224, 0.225])
EMPTY = ValueError("IMAGES is empty: send the bytes of one file or more")


class TritonPythonModel:
    def initialize(self, args):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = resnet18().eval().to(self.device)  # load your weights here
        self.transforms = [Resize(256), CenterCrop(224), K.Normalize(mean=MEAN, std=STD)]

    @torch.inference_mode()
    def logits(self, files):
        images = preprocess(files, self.transforms, device=self.device)
        return self.model(images).float().cpu()

    def execute(self, requests):
        batches = [
            pb_utils.get_input_tensor_by_name(request, "IMAGES").as_numpy().ravel().tolist()
            for request in requests
        ]
        # In one batch, if none of its files is bad. An empty request has no part in it.
        filled = [files for files in batches if files]
        answers = iter(self.answers(filled))
        return [respond(next(answers) if files else EMPTY) for files in batches]

    def answers(self, batches):
        """Logits for each list of files, or the error of one that holds a bad file."""
        if not batches:
            return []
        try:
            logits = self.logits([file for files in batches for file in files])
            return logits.split([len(files) for files in batches])
        except BadImageError:  # of one of them: each alone, to tell whose
            return [self.answer_alone(files) for files in batches]

    def answer_alone(self, files):
        try:
            return self.logits(files)
        except BadImageError as error:
            return error


def respond(answer):
    if isinstance(answer, ValueError):  # as BadImageError is
        return pb_utils.InferenceResponse([], pb_utils.TritonError(str(answer)))
    return pb_utils.InferenceResponse([pb_utils.Tensor("LOGITS", answer.numpy())])
