// Elements are made here and filled with text nodes only, so that nothing a model writes is ever read as HTML.

const byId = (id) => document.getElementById(id);

/** Return a new element. Attributes that are false or null are left out; children are elements or texts. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  setAttributes(element, attributes);
  element.append(...children);
  return element;
}

/** The same for SVG. */
function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  setAttributes(element, attributes);
  element.append(...children);
  return element;
}

function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
}

/** Say something in a status line; saying the same again changes nothing, so that it is not read out again. */
function say(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}
