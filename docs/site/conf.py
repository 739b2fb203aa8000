"""The pages as a site, by Sphinx: `make site`. stage.py puts them together."""

project = "onnxgrad"
html_title = "onnxgrad"
extensions = ["myst_parser", "sphinx_copybutton"]
html_theme = "furo"
html_theme_options = {"top_of_page_buttons": []}
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["wide.css"]
myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline"]
copybutton_prompt_text = "$ "
# ONNX's text form and TOML with settings of ours are no languages that Pygments knows whole.
suppress_warnings = ["misc.highlighting_failure"]
