// Shows each frame that the controller sends, and says when none comes.
"use strict";
const shown = document.getElementById("frame");
const silence = document.getElementById("silence");

function watch() {
  const events = new EventSource("events");
  events.onmessage = (event) => {
    shown.innerHTML = JSON.parse(event.data);
    silence.hidden = true;
  };
  events.onerror = () => {
    silence.hidden = false;
    if (events.readyState === EventSource.CLOSED) setTimeout(watch, 5000);
  };
}
watch();
