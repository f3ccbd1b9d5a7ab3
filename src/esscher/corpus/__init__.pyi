from .documents import read_documents as read_documents
from .spec import CorpusSpec as CorpusSpec
from .windows import Windows as Windows, make_windows as make_windows
